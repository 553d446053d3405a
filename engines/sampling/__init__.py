"""Token sampling: the sampler, the seeds and the ends of responses. The rules are the same for every engine."""
