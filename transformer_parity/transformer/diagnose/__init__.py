"""Diagnosis: where a difference starts, and which known mistake or convention explains it.

A diagnosis has the following steps. Each step that finds a cause with certainty ends it.

1. ``investigate`` (a port) or ``files`` (tensors from files) selects the first failure of each stage, and omits stages
   that only follow from it.
2. Only a port can be run again: ``investigate`` and ``properties`` test whether it writes to its inputs, is random, has
   state between calls, or differs only without taps. ``properties`` recognizes float32 in the tensors of both.
3. ``diagnosis.diagnose`` looks for a change of the NumPy reference that reproduces every tensor of the case, and of the
   other cases of the model:
   a. the catalog and the conventions (``hypotheses``), with numbers read off the tensors (``measured*``);
   b. for searches, their numbers (``search_parameters``);
   c. a mistake in some blocks only (``places``);
   d. for training, the learning rate of each step (``schedule``) or a number of the optimizer (``measured_optimizer``);
   e. two or three mistakes together (``several``);
   f. for activations, a mistake that reproduces all tensors except taps of one kind, or only the output.
   ``trials`` runs and caches the changed references.
4. If no change is exact, statements describe the difference, the strongest first: NaN or infinity (``patterns``),
   exchanged names (``exchanged``), the port's own ``forward`` and its first step (``own_forward``, ``measured``), which
   tensors and cases differ (``patterns``, ``circumstances``, ``stale``).
5. ``blame`` replays the case and finds the block that introduces the difference. ``statements`` describes its error
   (``signatures``, ``factors``, ``kernels``), and ``reproduce`` saves the inputs of the block.
"""
