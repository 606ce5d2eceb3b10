"""The claims, and the commands that judge them. The only place that imports all the others."""
