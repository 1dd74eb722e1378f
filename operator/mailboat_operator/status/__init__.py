"""Statuses of both kinds, built from relay reports. Pure functions; time is an argument.

Numbers are rounded before the comparison, so that an unchanged status is not written again: in an idle cluster the
operator writes nothing.
"""
