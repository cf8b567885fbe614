"""Answers as pictures and pages: the memory of a step over its course, plans as a frontier, and how notebooks show both."""
