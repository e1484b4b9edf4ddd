"""Where a difference was introduced, and which known mistake or convention explains it."""
