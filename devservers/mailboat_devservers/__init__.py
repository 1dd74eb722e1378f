"""Start the real servers that the demo, the tests and the benchmarks use."""
