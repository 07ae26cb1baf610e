"""Trajectories for the terminal, the browser and notebooks."""
