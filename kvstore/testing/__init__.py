"""Contract suites, a simulated disk and a simulated clock, for our tests and for others' tiers."""
