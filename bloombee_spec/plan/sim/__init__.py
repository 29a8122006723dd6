"""Parts of the discrete-event simulator; `bloombee_spec.plan.simulate` is its front door."""
