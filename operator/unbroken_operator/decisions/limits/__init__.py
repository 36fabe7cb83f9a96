"""How much one job may cost the others: rates, sizes and numbers, by the job's own spec. No input or output."""
