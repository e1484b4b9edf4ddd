"""The commands of ``parity``, one a module: ``add_parser`` describes the options, ``run`` does the work."""
