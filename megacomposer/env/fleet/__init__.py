"""Executors: thousands of jobs on processes and machines."""
