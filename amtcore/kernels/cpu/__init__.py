"""Operations on this processor: compiled loops, and threads that run them."""
