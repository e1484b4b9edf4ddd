"""A port in a case, compared with the reference by the stage of the case."""
