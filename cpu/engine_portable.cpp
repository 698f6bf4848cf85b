// The engine in plain C++.
#include "headers.h"

#define SB3_FP16_ENGINE engine_portable
#include "engine.inl"
