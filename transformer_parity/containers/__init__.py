"""Files of other people's software, read into NumPy arrays: nothing in them is run, and sizes are bounded first."""
