"""A process of a run on several devices: trains its part and keeps what it saw.

A run has a folder. The processes read ``job.json`` and ``job.npz`` there, and each writes ``process-N.json`` and
``process-N.npz``, N from 0. How the processes find one another is said as the framework wants to hear it: RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (as torchrun says it), JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES
and JAX_PROCESS_ID, or TF_CONFIG; ``make_mesh`` of the package joins them. The number of devices of one process is
JAX_NUM_CPU_DEVICES; TensorFlow's ``make_mesh`` divides the CPU itself.

``job.json``: backend, plan, config, settings, seed, dropout, dtype, device, steps, first (the steps taken before, for
a run that goes on). ``job.npz``: ``weight NAME``, ``first moment NAME``, ``second moment NAME`` (those of a run that
goes on), ``batch STEP source_ids``, ``target_ids``, ``labels``: the whole batch of each step.
``process-N.json``: losses, tokens, norms (of each step), and the hash of each shard of each parameter after the last
step, with device and index. ``process-N.npz``: ``gradient NAME`` of the first step, ``weight NAME``, ``first moment
NAME`` and ``second moment NAME`` after the last, whole.
"""
