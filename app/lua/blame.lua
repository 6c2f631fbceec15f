-- Count the death of a model server that was working on a sample. Keys and arguments: lane.lua.
--
-- Returns 1 when the sample is a suspect now: it is given back, for it is to be asked in the lane. Else 0.
local flight = redis.call('HGET', KEYS[2], ID)
if not flight or string.match(flight, '^(.*)|') ~= OWNER then
    return 0
end
local _, points = strike()
if points < SUSPECT then
    return 0
end
redis.call('HDEL', KEYS[2], ID)
return 1
