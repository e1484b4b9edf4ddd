"""Compare a port with the reference, case by case, as the stage of each case specifies."""
