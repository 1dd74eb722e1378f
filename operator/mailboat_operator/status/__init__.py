"""Statuses of the two resources, pure: from the facts of one moment to the complete status.

Every function takes the existing status, so that a condition keeps its transition time. ``patch`` compares both; a
status that did not change costs no request. Numbers are rounded (``rounding``), so that a busy subscription does not
cause a write per reconcile.
"""
