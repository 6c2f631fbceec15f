-- The round of a payload; stands before put.lua and finish.lua.
--
-- A payload is one JSON object whose last two fields are `round` (left out where it is 0) and `settings` (a hexadecimal
-- fingerprint, or left out): the end tells the round, whatever the prompt says, and nothing has to be parsed.
local END_BYTES = 256
local function round_of(payload)
    local ending = string.sub(payload, -END_BYTES)
    local round = string.match(ending, ',"round":(%d+),"settings":"[^"]*"}$') or string.match(ending, ',"round":(%d+)}$')
    return tonumber(round or 0)
end

