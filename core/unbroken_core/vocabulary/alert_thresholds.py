"""From when on somebody should look at a job, although it recovers, or runs.

Conditions and advice use these numbers; the alerts UnbrokenRestartStorm and UnbrokenNoProgress are tested against them.
"""

STORM_RECOVERIES, STORM_S = 5, 900
"""More recoveries than this within so many seconds are a storm."""
STILL_S = 1800
"""A job that has its pods, and has reached nothing new for so many seconds, makes no progress."""
