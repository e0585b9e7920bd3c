"""What changes the host: plans of steps, and the durable job that carries one out."""
