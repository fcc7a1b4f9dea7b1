"""All that crosses ranks: messages, the channel both sides speak, and its transports."""
