"""Cards that change sides: what is there, what stands in the way, what was left half done."""
