"""Files of other software, read into NumPy arrays: nothing in them is run, and sizes are bounded first."""
