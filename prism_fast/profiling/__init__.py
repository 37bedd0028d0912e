"""Where step time goes: machine facts, throughput profiles, probes (profiles.md). Nothing here reaches a score."""
