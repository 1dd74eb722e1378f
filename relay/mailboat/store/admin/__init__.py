"""Queries and changes for commands of the administrator: dead letters, parked events, overview."""
