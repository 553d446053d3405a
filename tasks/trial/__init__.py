"""The trial of an author's own code before a run: imported as ranks import it, and run on a few made-up rows."""
