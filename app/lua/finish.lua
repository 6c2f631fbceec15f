-- Drop the payloads of recorded samples and count those that had one: a second call, after a lost reply, counts nothing.
-- The payload of a later round stays, with all that belongs to it: that round is still to do.
--
-- KEYS[1] prompts, KEYS[2] flights, KEYS[3] deaths, KEYS[4] crashes, KEYS[5] suspects, KEYS[6] again:failed,
-- KEYS[7] again:rejected, KEYS[8] lane, KEYS[9] rates, KEYS[10] stats
-- ARGV    folder, unix second, seconds for which the lane stays wide, then for each sample: id, the recorded round
--         (nothing: whatever the round), and its counts as "field=amount field=amount" (nothing: it is not counted)
local FOLDER, SECOND, KEEP_S = ARGV[1], ARGV[2], ARGV[3]
local PER_SECOND = {accepted = true, rejected = true, failed = true, tokens = true}
local ids, members, recorded, sums, seen = {}, {}, {}, {}, {}
for at = 4, #ARGV, 3 do
    local id, round, counts = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
    local payload = redis.call('HGET', KEYS[1], id)
    if not seen[id] and not (payload and round and round_of(payload) > round) then
        seen[id] = true
        ids[#ids + 1] = id
        local member = FOLDER .. '|' .. id
        members[#members + 1] = member
        if counts ~= '' then
            recorded[#recorded + 1] = member
        end
        if payload then
            for field, amount in string.gmatch(counts, '([^ =]+)=(%d+)') do
                sums[field] = (sums[field] or 0) + tonumber(amount)
            end
        end
    end
end
if #ids == 0 then
    return
end
-- What frees memory comes first: a Redis that is full refuses a script whose first write takes some.
for key = 1, 4 do
    redis.call('HDEL', KEYS[key], unpack(ids))
end
redis.call('SREM', KEYS[6], unpack(ids))
redis.call('SREM', KEYS[7], unpack(ids))
local suspects = #recorded > 0 and redis.call('HDEL', KEYS[5], unpack(recorded)) or 0
redis.call('HDEL', KEYS[5], unpack(members))
if suspects > 0 then
    redis.call('INCRBY', KEYS[8], suspects)
    redis.call('EXPIRE', KEYS[8], KEEP_S)
end
for field, amount in pairs(sums) do
    local n = string.format('%.0f', amount)
    redis.call('HINCRBY', KEYS[10], field, n)
    if PER_SECOND[field] then
        redis.call('HINCRBY', KEYS[9], SECOND .. ':' .. field, n)
    end
end
