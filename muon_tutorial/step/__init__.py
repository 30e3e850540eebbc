"""One optimizer step, in seven phases: generators that ask for collectives. Read ``step`` first."""
