-- Give a sample back that was taken and not recorded, unless another worker has taken it over since.
--
-- KEYS[1] flights   hash  sample id -> "owner|unix seconds" of who asks it
-- ARGV    sample id, owner
local flight = redis.call('HGET', KEYS[1], ARGV[1])
if flight and string.match(flight, '^(.*)|') == ARGV[2] then
    redis.call('HDEL', KEYS[1], ARGV[1])
end
