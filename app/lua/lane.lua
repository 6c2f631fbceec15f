-- Deaths of samples, and the lane in which suspects fly; stands before take.lua, blame.lua and release.lua.
-- docs/design/poison.md says why.
--
-- KEYS[1] prompts   hash    sample id -> payload of what is still to do
-- KEYS[2] flights   hash    sample id -> "owner|unix seconds" of who asks it
-- KEYS[3] deaths    hash    sample id -> "deaths|points": owners and engines that died over it, and what that proves
-- KEYS[4] paused    hash    dataset -> why
-- KEYS[5] suspects  hash    "folder|sample id" -> "owner|how" of suspects in flight; no owner: known to be dead
-- KEYS[6] lane      string  suspects recorded since the last death in the lane
-- KEYS[7] datasets  hash    dataset -> folder
-- ARGV    sample id, owner, dataset, folder, and the prefixes of the keys: heartbeat, flights, deaths
--
-- How a suspect flies: `alone`, `beside` samples without a death, or `together` with others that may be to blame.
local ID, OWNER, DATASET, FOLDER, WORKER, FLIGHTS, DEATHS = unpack(ARGV)
local MEMBER = FOLDER .. '|' .. ID
local SUSPECT, POISON = 4, 6
local MOST_DOUBLINGS = 20

local known = {[''] = false}
local function lives(owner)
    if known[owner] == nil then
        known[owner] = redis.call('EXISTS', WORKER .. owner) == 1
    end
    return known[owner]
end

local function deaths_of()
    local deaths, points = string.match(redis.call('HGET', KEYS[3], ID) or '', '^(%d+)|(%d+)$')
    return tonumber(deaths or 0), tonumber(points or 0)
end

-- Count a death over this sample; return how many there were and the points.
local function strike()
    local deaths, points = deaths_of()
    local owner, how = string.match(redis.call('HGET', KEYS[5], MEMBER) or '', '^(.*)|(%a+)$')
    if how then
        redis.call('HDEL', KEYS[5], MEMBER)
        if owner ~= '' then
            redis.call('DEL', KEYS[6])
        end
    end
    if points < SUSPECT or how == 'alone' then
        points = points + 2
    elseif how == 'beside' then
        points = points + 1
    end
    redis.call('HSET', KEYS[3], ID, (deaths + 1) .. '|' .. points)
    return deaths + 1, points
end

-- Return the suspects that living owners ask, this sample left out; a death seen here for the first time ends the ramp.
local function others_in_lane()
    local entries, others = redis.call('HGETALL', KEYS[5]), {}
    for at = 1, #entries, 2 do
        local owner, how = string.match(entries[at + 1], '^(.*)|(%a+)$')
        if entries[at] ~= MEMBER and lives(owner) then
            others[#others + 1] = {entries[at], owner, how}
        elseif entries[at] ~= MEMBER and owner ~= '' then
            redis.call('HSET', KEYS[5], entries[at], '|' .. how)
            redis.call('DEL', KEYS[6])
        end
    end
    return others
end

-- Return how a suspect flies that has the lane for itself.
local function company()
    local how = 'alone'
    for _, folder in ipairs(redis.call('HVALS', KEYS[7])) do
        local flights = redis.call('HGETALL', FLIGHTS .. folder)
        for at = 1, #flights, 2 do
            local is_other = folder ~= FOLDER or flights[at] ~= ID
            if is_other and lives(string.match(flights[at + 1], '^(.*)|')) then
                if redis.call('HEXISTS', DEATHS .. folder, flights[at]) == 1 then
                    return 'together'
                end
                how = 'beside'
            end
        end
    end
    return how
end

-- Note that this sample, which is no suspect, flies beside whoever is in the lane.
local function fly_beside(deaths)
    if redis.call('HLEN', KEYS[5]) == 0 then
        return
    end
    for _, other in ipairs(others_in_lane()) do
        if other[3] ~= 'together' then
            redis.call('HSET', KEYS[5], other[1], other[2] .. '|' .. (deaths > 0 and 'together' or 'beside'))
        end
    end
end

-- Let this suspect into the lane, or return false when it is full.
local function enter_lane()
    local others = others_in_lane()
    local recorded = tonumber(redis.call('GET', KEYS[6]) or 0)
    if #others >= 2 ^ math.min(recorded, MOST_DOUBLINGS) then
        return false
    end
    for _, other in ipairs(others) do
        redis.call('HSET', KEYS[5], other[1], other[2] .. '|together')
    end
    redis.call('HSET', KEYS[5], MEMBER, OWNER .. '|' .. (#others > 0 and 'together' or company()))
    return true
end

