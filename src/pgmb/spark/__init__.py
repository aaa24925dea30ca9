"""Events in Spark: `format("pgmb")`, at rest and in motion."""
