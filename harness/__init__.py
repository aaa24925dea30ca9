"""Throwaway PostgreSQL servers and stepped sessions for tests, benchmarks and fault scripts."""
