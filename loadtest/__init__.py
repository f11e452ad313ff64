"""Load, benchmarks and the data they run on."""
