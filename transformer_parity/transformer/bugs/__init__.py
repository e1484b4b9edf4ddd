"""The bug catalog: the edits that inject each known bug into a port, and the tap at which each bug must be found."""
