"""Statuses of the two resources, pure: from the facts of one moment to the complete status.

Every function takes the existing status, so that a condition keeps its transition time. Numbers are rounded, so that a
busy subscription does not cause a write per reconcile.
"""
