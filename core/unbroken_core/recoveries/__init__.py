"""Which rung a recovery takes, what budgets are left, what past recoveries cost."""
