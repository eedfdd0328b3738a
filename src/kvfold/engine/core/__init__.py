"""The engine loop (schedule, run, postprocess), the scheduler and the prefix cache."""
