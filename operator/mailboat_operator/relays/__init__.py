"""Relay pods: their reports, the calls to them, and the partition assignment."""
