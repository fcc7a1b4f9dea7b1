"""ClusterEnv as other libraries want it.  Each module needs its library, and is imported only by who has that."""
