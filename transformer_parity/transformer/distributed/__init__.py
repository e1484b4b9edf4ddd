"""One run on several devices against the same run on one: cases, processes that train, and the comparison."""
