"""The paper's comparison on this machine's own cores: one core stands for one device."""
