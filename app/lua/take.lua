-- Take a sample for one worker, or say why not. Keys and arguments: lane.lua.
--
-- Returns {state}, and {state, payload, deaths} where it was taken:
--   gone    no payload: somebody recorded it
--   held    another living worker asks it
--   paused  not taken: the dataset is paused
--   aside   not taken: it has just become a suspect, and comes after all that is queued
--   full    not taken: a suspect, and the lane has no room
--   poison  taken, to be given up: it has killed often enough
--   new     taken, nobody had it
--   mine    taken, this owner had it already
--   orphan  taken over from a worker whose heartbeat has expired
local payload = redis.call('HGET', KEYS[1], ID)
if not payload then
    redis.call('HDEL', KEYS[2], ID)
    redis.call('HDEL', KEYS[5], MEMBER)
    return {'gone'}
end
local state, flight = 'new', redis.call('HGET', KEYS[2], ID)
if flight then
    local owner = string.match(flight, '^(.*)|')
    if owner == OWNER then
        state = 'mine'
    elseif lives(owner) then
        return {'held'}
    else
        state = 'orphan'
    end
end
if redis.call('HEXISTS', KEYS[4], DATASET) == 1 then
    if state == 'mine' then
        -- Its owner hands the ticket back, and would keep all others from the sample as long as it lives.
        redis.call('HDEL', KEYS[2], ID)
        redis.call('HDEL', KEYS[5], MEMBER)
    end
    return {'paused'}
end
local deaths, points = deaths_of()
if state == 'orphan' then
    deaths, points = strike()
    redis.call('HDEL', KEYS[2], ID)
    if points >= SUSPECT and points < POISON then
        return {'aside'}
    end
end
if points >= POISON then
    state = 'poison'
elseif points < SUSPECT then
    fly_beside(deaths)
elseif (state ~= 'mine' or redis.call('HEXISTS', KEYS[5], MEMBER) == 0) and not enter_lane() then
    redis.call('HDEL', KEYS[2], ID)
    return {'full'}
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[2], ID, OWNER .. '|' .. time[1] .. '.' .. string.format('%06d', time[2]))
return {state, payload, deaths}
