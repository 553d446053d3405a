"""Drawing tokens: the sampler, the seeds and the ends of responses, one rule for every engine."""
