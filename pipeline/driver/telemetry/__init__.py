"""What a run shows to the machines that watch it: figures for Prometheus, spans for OpenTelemetry.

Both are fed the events of the driver and nothing else, so neither can slow or change a run's work;
where neither is asked for, nothing of this is imported. Workers count and time for them anyway
(`common.counts`, `common.timing`).
"""
