"""The bug catalog: for each known bug, the edits that inject it into a port, and the tap at which it must be found."""
