-- Give a sample back that was taken and not recorded, unless another worker has taken it over since. Keys and
-- arguments: lane.lua.
local flight = redis.call('HGET', KEYS[2], ID)
if flight and string.match(flight, '^(.*)|') == OWNER then
    redis.call('HDEL', KEYS[2], ID)
    redis.call('HDEL', KEYS[5], MEMBER)
end
