"""Figures that planner modules read, each file made by a command of memplan."""
