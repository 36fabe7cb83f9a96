"""The job's coordinator: a pure state machine of members, plan and phase. No input or output, no clock."""
