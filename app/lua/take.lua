-- Take a sample for one worker, or say why not.
--
-- KEYS[1] prompts   hash  sample id -> payload of what is still to do
-- KEYS[2] flights   hash  sample id -> "owner|unix seconds" of who asks it
-- KEYS[3] deaths    hash  sample id -> owners that died while asking it
-- KEYS[4] paused    hash  dataset -> why
-- ARGV    sample id, owner, prefix of the workers' heartbeat keys, dataset
--
-- Returns {state, payload, deaths}:
--   gone    no payload: somebody recorded it
--   held    another living worker asks it
--   paused  not taken: the dataset is paused
--   new     taken, nobody had it
--   mine    taken, this owner had it already
--   orphan  taken over from a worker whose heartbeat has expired
local payload = redis.call('HGET', KEYS[1], ARGV[1])
if not payload then
    redis.call('HDEL', KEYS[2], ARGV[1])
    return {'gone'}
end
local state, flight = 'new', redis.call('HGET', KEYS[2], ARGV[1])
if flight then
    local owner = string.match(flight, '^(.*)|')
    if owner == ARGV[2] then
        state = 'mine'
    elseif redis.call('EXISTS', ARGV[3] .. owner) == 1 then
        return {'held'}
    else
        state = 'orphan'
    end
end
if redis.call('HEXISTS', KEYS[4], ARGV[4]) == 1 then
    return {'paused'}
end
if state == 'orphan' then
    redis.call('HINCRBY', KEYS[3], ARGV[1], 1)
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2] .. '|' .. redis.call('TIME')[1])
return {state, payload, tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or 0)}
