// The engine on portable. Library headers come first: their functions are shared with other files and must run anywhere.
#include "headers.h"

#define SB3_FP16_ENGINE engine_portable
#include "engine.inl"
