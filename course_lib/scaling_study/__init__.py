"""The scaling study: what is run, what it costs, what came out, with the prediction beside."""
