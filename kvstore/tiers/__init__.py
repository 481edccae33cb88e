"""How bytes sit on a medium: frames, the DRAM arena, the SSD log."""
