"""Where blocks move and when: promotion, demotion, write-back, and the workers that carry bytes."""
